"""What a text says of a function, before anything is called: names, comments, masks, layouts."""
