"""Ops of the step: a torch reference beside each, and the dispatcher that picks an implementation."""
