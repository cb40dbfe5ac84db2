"""Startup shared by training and evaluation: components, their placement, and the memory that they need."""
