"""Files of this machine: trees that are sent, files that are there whole or not at all, settings of agents, amounts of
memory as people write them."""
