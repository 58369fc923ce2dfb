"""Machines that are nowhere, and their compiler: XLA for the CPU under another name."""
