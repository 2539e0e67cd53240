"""Data parallelism: what ranks must agree on."""
