"""The common ground of what listens at an address: the server and the page."""
