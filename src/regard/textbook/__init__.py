"""The steps of attention, declared once. Knows no array's origin, no label and no view."""
