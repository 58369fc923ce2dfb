"""For plugin authors: conformance suites to subclass, and fixtures. Imports nothing heavy."""
