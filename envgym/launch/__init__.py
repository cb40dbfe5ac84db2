"""The start of training and evaluation alike: components, where they run, and the memory that they need."""
