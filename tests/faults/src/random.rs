//! Seeded random numbers: SplitMix64, which is enough to vary a load and a schedule.

/// A generator; the same seed gives the same numbers.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Makes a generator from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `bound`; 0 when that is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number().checked_rem(bound).unwrap_or_default()
    }

    /// True with a probability of `in_a_thousand` / 1000.
    pub fn chance(&mut self, in_a_thousand: u64) -> bool {
        self.below(1000) < in_a_thousand
    }

    /// Below `bound`, with small numbers far more likely than large ones, roughly by Zipf's law.
    pub fn zipf(&mut self, bound: u64) -> u64 {
        let share = self.number() as f64 / u64::MAX as f64;
        ((bound as f64 + 1.0).powf(share) - 1.0) as u64
    }
}
