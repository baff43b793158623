"""How the agent of a host is started, and by what it is talked to."""
