"""Users' code kept from harming a run: under deadlines, in threads, in processes of its own."""
