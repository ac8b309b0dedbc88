"""What ranks ask their job for while they train: shards of datasets and a key-value store."""
