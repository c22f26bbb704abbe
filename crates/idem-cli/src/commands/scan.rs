//! Reads all records, part by part.

use std::error::Error;
use std::num::NonZeroU32;
use std::ops::ControlFlow;

use idem_core::{PartSize, RecordFilter, RecordPage, StoreError};

use crate::output::Progress;
use crate::store::Store;

/// How many records the parts of a scan have at most. They begin smaller, so that the first records come at once.
const LARGEST_PART: NonZeroU32 = NonZeroU32::new(8_000).expect("not zero");

/// The sizes of the parts of a scan: they grow until one takes too long, and are smaller from then on.
pub(crate) struct Parts {
    size: PartSize,
    has_shrunk: bool,
}

impl Parts {
    pub(crate) fn new() -> Self {
        Self { size: PartSize::new(), has_shrunk: false }
    }

    pub(crate) fn get(&self) -> NonZeroU32 {
        self.size.get()
    }

    pub(crate) fn succeeded(&mut self) {
        if !self.has_shrunk {
            self.size.grow_to(LARGEST_PART);
        }
    }

    /// Fails with the error, unless a smaller part may succeed.
    pub(crate) fn failed(&mut self, error: StoreError) -> Result<(), StoreError> {
        self.has_shrunk = true;
        self.size.shrink(error)
    }
}

/// How many records a scan has read.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    pub(crate) records: u64,
    /// Those of them that cannot be read, perhaps because a newer version wrote them. The store has logged their ids.
    pub(crate) unreadable: u64,
}

/// Gives each part of the records that `filter` selects to `each`, until it breaks. After a timeout, the parts are smaller.
///
/// A record that is made meanwhile may be missed.
pub(crate) async fn scan(
    store: &dyn Store,
    filter: &RecordFilter,
    mut each: impl AsyncFnMut(&Progress, RecordPage) -> Result<ControlFlow<()>, Box<dyn Error>>,
) -> Result<Scanned, Box<dyn Error>> {
    let (mut scanned, mut from, mut part) = (Scanned::default(), None, Parts::new());
    let progress = Progress::start("reading records");
    loop {
        let mut page = match store.list(filter, from.as_ref(), part.get()).await {
            Ok(page) => page,
            Err(error) => {
                part.failed(error)?;
                continue;
            }
        };
        part.succeeded();
        scanned.records += page.scanned;
        scanned.unreadable += page.unreadable;
        progress.show(scanned.records, page.progress);
        from = page.next.take();
        if each(&progress, page).await?.is_break() || from.is_none() {
            break;
        }
    }
    progress.end();
    Ok(scanned)
}

impl Scanned {
    /// Says how many records cannot be read, if there are any.
    pub(crate) fn report_unreadable(&self) {
        if self.unreadable > 0 {
            eprintln!("{} records cannot be read, perhaps because a newer version wrote them", self.unreadable);
        }
    }
}
