"""The record of a run: its files, their schemas, and the checks that give a verdict from the files alone."""
