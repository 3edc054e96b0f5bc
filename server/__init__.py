"""The server side of pdctl: the router, the workers and what they are made of."""
