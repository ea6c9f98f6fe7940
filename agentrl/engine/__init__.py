"""Generation back ends behind `record.protocols.Engine`."""
