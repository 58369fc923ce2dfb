"""A hardware backend outside core: a machine, its rule, its options and a kernel; runs on CPUs."""
