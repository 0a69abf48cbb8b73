//! temp
use std::ops::Range;
use training::Runs;
/// Region
#[derive(Debug, Clone)]
pub struct Region {
    /// d
    pub dims: Vec<usize>,
    /// r
    pub runs: Runs,
    /// w
    pub window: Range<usize>,
}
