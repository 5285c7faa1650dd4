"""What unit, integration and end-to-end tests share: processes, clients, clusters, fakes and load."""
