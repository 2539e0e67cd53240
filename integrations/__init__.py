"""Plugs into training frameworks, one module each. Installed as `ampplug.integrations`; none of them is imported until it is asked for."""
