"""What the answers show: comparisons with the catalogue, properties, measurements, repairs."""
