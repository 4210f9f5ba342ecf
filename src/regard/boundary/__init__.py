"""What enters and leaves: arrays of other libraries, values from outside, files."""
