"""`dps simulate`: a fleet of emulated engines behind the gateway's routing policies, in virtual time."""
