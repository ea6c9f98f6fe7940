"""The training side: packing, policy update, training loop."""
