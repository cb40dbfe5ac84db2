"""The processes that hold models: the engine and the ModelWorkers, and the runtimes that start them."""
