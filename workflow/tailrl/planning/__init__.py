"""What a study will need before it runs: memory, time and disk, from its settings and a machine's throughputs."""
