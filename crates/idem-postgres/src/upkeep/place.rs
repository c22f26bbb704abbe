//! Where a scan of all records goes on.
//!
//! Records are read in the order in which they lie in their table. In the order of their ids, which are digests, a table that does
//! not fit into memory would be read at random, once for each row. A settlement mostly leaves its row in its block, at another line.

use idem_core::{ScanPosition, StoreError, StoreErrorKind};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

/// A place in the table of records: a scan goes on behind it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) block: u32,
    /// The line of a row in the block; 0 is before the first.
    pub(crate) line: u16,
    /// The partition of that row. Each partition has rows at the same places.
    pub(crate) relation: u32,
}

/// How far a scan has come after a part.
#[derive(Debug)]
pub(crate) struct Progress {
    pub(crate) scanned: u64,
    pub(crate) next: Option<ScanPosition>,
    /// From 0 to 1.
    pub(crate) done: f64,
}

impl Place {
    /// The place that a position means; the beginning if there is none.
    pub(crate) fn of(position: Option<&ScanPosition>) -> Result<Self, StoreError> {
        let Some(position) = position else { return Ok(Self::default()) };
        let &[b0, b1, b2, b3, l0, l1, r0, r1, r2, r3] = position.as_bytes() else {
            let message =
                "could not go on with a scan: its position is not one of this store; begin again without a position";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        };
        Ok(Self {
            block: u32::from_be_bytes([b0, b1, b2, b3]),
            line: u16::from_be_bytes([l0, l1]),
            relation: u32::from_be_bytes([r0, r1, r2, r3]),
        })
    }

    fn position(self) -> ScanPosition {
        let Self { block, line, relation } = self;
        ScanPosition::from_bytes([&block.to_be_bytes()[..], &line.to_be_bytes(), &relation.to_be_bytes()].concat())
    }
}

impl Progress {
    /// Reads the columns behind the time: the rows of the part, the place of its last row, the blocks that were read from `from` on,
    /// and all blocks.
    pub(crate) fn read(row: &PgRow, from: Place, limit: u32) -> Result<Self, sqlx::Error> {
        let (scanned, last, relation): (i64, Option<String>, Option<i64>) =
            (row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
        let (blocks, total): (i64, i64) = (row.try_get(4)?, row.try_get(5)?);
        let next = if scanned >= i64::from(limit) {
            // A full part may end within its blocks.
            let (block, line) = last.as_deref().and_then(read_line).ok_or_else(|| damaged("the place of a row"))?;
            let relation = relation.and_then(|relation| u32::try_from(relation).ok());
            Some(Place { block, line, relation: relation.ok_or_else(|| damaged("the table of a row"))? })
        } else {
            let block = i64::from(from.block).saturating_add(blocks);
            u32::try_from(block).ok().filter(|_| block < total).map(|block| Place { block, ..Place::default() })
        };
        let done = next.map_or(1.0, |next| f64::from(next.block) / (total.max(1) as f64));
        Ok(Self { scanned: scanned.unsigned_abs(), next: next.map(Place::position), done })
    }
}

/// The block and the line of a text such as `(12,5)`.
fn read_line(text: &str) -> Option<(u32, u16)> {
    let (block, line) = text.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
    Some((block.parse().ok()?, line.parse().ok()?))
}

fn damaged(what: &str) -> sqlx::Error {
    sqlx::Error::Decode(format!("{what} could not be read").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_read_back() {
        for place in [Place::default(), Place { block: u32::MAX, line: 291, relation: 16_400 }] {
            assert_eq!(Place::of(Some(&place.position())).unwrap(), place);
        }
        assert_eq!(Place::of(None).unwrap(), Place::default());
        for bytes in [&[][..], &[0; 9], &[0; 32]] {
            let error = Place::of(Some(&ScanPosition::from_bytes(bytes))).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
        }
    }

    #[test]
    fn a_line_is_read_from_its_text() {
        assert_eq!(read_line("(4294967295,291)"), Some((u32::MAX, 291)));
        for text in ["", "(1,2", "1,2", "(1)", "(-1,2)", "(1,70000)"] {
            assert_eq!(read_line(text), None, "{text}");
        }
    }
}
