//! Choices derived from an input alone.

/// A sequence of numbers derived from an input. The same input gives the same sequence, so that a failure can be reproduced.
#[derive(Debug)]
pub struct Choices(u64);

impl Choices {
    /// The sequence of this input.
    #[must_use]
    pub fn of(input: &[u8]) -> Self {
        // FNV-1a, by which similar inputs give different sequences.
        Self(
            input
                .iter()
                .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)),
        )
    }

    /// The next number, evenly spread over 64 bits.
    pub fn number(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// The next number below `limit`; 0 when that is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.number() % limit).unwrap_or(0)
    }

    /// A random element; `None` if there are none.
    pub fn one_of<'a, T>(&mut self, choices: &'a [T]) -> Option<&'a T> {
        choices.get(self.below(choices.len()))
    }
}
