"""The transport of weights: buckets, sender, receiver."""
