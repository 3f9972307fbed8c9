//! A small generator of numbers (splitmix64), so that a seed replays the same run on every machine and in every
//! version of every library. It is not meant to be unpredictable.

/// A seeded source of numbers.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Nearby seeds give unrelated sequences.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1));
        rng.next();
        rng
    }

    /// The next 64 bits.
    #[expect(clippy::should_implement_trait, reason = "an endless source is no iterator that callers would want to adapt")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if there is none.
    pub fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.next() % bound).unwrap_or(0)
    }

    /// True in `percent` of a hundred cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of them, if there is any.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len()))
    }
}
