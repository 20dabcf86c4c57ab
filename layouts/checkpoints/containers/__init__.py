"""The file formats that checkpoints come in: headers read and checked, nothing known of experts."""
