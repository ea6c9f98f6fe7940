"""Where the components of a run live: hosts, processes, and the calls between them."""
