"""What people and programs read: progress, plans, inspections and figures."""
