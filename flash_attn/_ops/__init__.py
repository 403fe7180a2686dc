"""Ops of the library. Each module holds one family: its schemas, fakes, autograd and argument checks."""
