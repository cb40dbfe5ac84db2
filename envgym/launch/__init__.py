"""What training and evaluation both start from: components, where they run, and the memory that they need."""
