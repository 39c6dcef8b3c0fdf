"""Trial processes: protocol, template, supervision, and seats, local or on a Ray cluster."""
