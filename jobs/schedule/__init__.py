"""Which worker decodes which unit, when, and what follows a failure. Pure: no Ray, clock, disk or threads."""
