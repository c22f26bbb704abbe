-- peek: the record as it stands. Changes nothing.
--
-- KEYS 1  the record
-- ARGV 1  microseconds by which the time is moved
--
-- Returns the fields of `everything`, or nil when there is no record or it counts as absent.
--
-- Laws: L9.

return load() and everything()
