"""Ops of the library: one module a family, each with schema, fake, autograd and argument checks."""
