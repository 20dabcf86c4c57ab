"""What people and programs see: progress, plans, inspections, plots, the page of verify."""
