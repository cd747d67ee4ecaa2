"""What starts ranks: threads of this process, local processes, processes that join by themselves, Ray."""
