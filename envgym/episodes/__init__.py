"""Episodes on disk: one record, its files, generating them, judging them again."""
