"""Episodes on disk: their records, and files of them."""
