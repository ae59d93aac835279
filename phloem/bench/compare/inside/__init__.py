"""Scripts that run inside the peers' own environments. Nothing of Phloem can be imported there."""
