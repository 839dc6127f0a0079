"""The figures that the project claims, one module per `bench` command; GPU timing is in `timing`."""
