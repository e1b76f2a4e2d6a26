"""Bridges to other packages. Each module needs the package it is named after, and only then."""
