"""The engines: discovery and health of replicas, the choice among them, and the HTTP exchange with one."""
