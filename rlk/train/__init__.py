"""One TP x CP rank of the trainer: batches, loss, backward pass, optimizer."""
