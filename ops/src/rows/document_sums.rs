//! Sums over the places of each document, of all ranks that have some of them.

use candle_core::{DType, Device, Tensor};

use super::RowContext;
use crate::{DividedRows, Error, Result, tape};

/// Where a place of packed rows is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentPlace {
    /// Its document, counted over all rows.
    pub document: usize,
    /// The position in the document.
    pub position: usize,
    /// Number of places of the document.
    pub len: usize,
}

impl DocumentPlace {
    /// Whether it is its document's last place.
    pub fn is_last(&self) -> bool {
        self.position + 1 == self.len
    }
}

impl RowContext {
    /// Number of documents of `rows` rows: unless they are packed, each row is one.
    pub fn document_count(&self, rows: usize) -> usize {
        self.documents.as_ref().map_or(rows, |documents| documents.lengths().map(<[u32]>::len).sum())
    }

    /// Where each of the places is that this rank has, of `rows` rows of `own` places each, row by row; `None` for places that no
    /// document uses.
    ///
    /// # Errors
    /// [`Error::UnfitDocuments`] and [`Error::UnfitDivision`]: documents of other rows, or another number of places than this rank has.
    ///
    /// ```
    /// use ops::{Documents, RowContext};
    ///
    /// let packed = RowContext { documents: Some(Documents::new([vec![2, 1]])?), ..RowContext::default() };
    /// let places = packed.document_places("sum", [1, 4])?;
    /// let found: Vec<_> = places.iter().map(|place| place.map(|place| (place.document, place.is_last()))).collect();
    /// assert_eq!(found, [Some((0, false)), Some((0, true)), Some((1, true)), None]);
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn document_places(
        &self,
        operation: &'static str,
        [rows, own]: [usize; 2],
    ) -> Result<Vec<Option<DocumentPlace>>> {
        let len = self.divided.as_ref().map_or(own, DividedRows::len);
        if let Some(divided) = self.divided.as_ref().filter(|divided| divided.places().len() != own) {
            let problem = format!("{own} places: this rank has {} of a row", divided.places().len());
            return Err(Error::UnfitDivision { operation, problem });
        }
        let bounds = match &self.documents {
            Some(documents) => documents.of_rows(operation, [rows, len])?,
            None => vec![0..len as u32; rows * len],
        };
        let whole = |row: usize| row * len..(row + 1) * len;
        let mut found = Vec::with_capacity(rows * own);
        let mut before = 0;
        for row in 0..rows {
            let used = self.documents.as_ref().map_or(len, |documents| documents.used(row) as usize);
            let (mut document, mut of_places) = (before, Vec::with_capacity(len));
            for (place, bounds) in bounds[whole(row)].iter().enumerate().take(used) {
                let (position, len) = (place - bounds.start as usize, bounds.len());
                let at = DocumentPlace { document, position, len };
                document += usize::from(at.is_last());
                of_places.push(Some(at));
            }
            of_places.resize(len, None);
            before = document;
            match &self.divided {
                Some(divided) => {
                    found.extend(divided.places().iter().map(|place| of_places[*place as usize]))
                }
                None => found.extend(of_places),
            }
        }
        Ok(found)
    }
}

/// Sums `x` over places: `groups` has the group of each place, row by row, or `None` for one that counts nowhere. In a scope of
/// [`DividedRows`] the sums are over the places of all ranks, on each of them. With the places that
/// [`RowContext::document_places`] gives, groups are documents; with the last of each alone, the result is what `x` is there.
///
/// # Shapes
/// `x` `(rows, places, ..)` to `(count, ..)`.
///
/// # Cost
/// With divided rows, the sums are sent to each other rank; in backward their gradients, which are summed over ranks: what is made
/// of the sums must be divided by the ranks where all of them compute the same of it.
///
/// # Errors
/// Another number of groups than places, a group from `count` on; errors of candle, and failures of communication.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use ops::{Documents, RowContext, document_sums};
///
/// // A row of a document of two places and one of a single place; the last place is unused.
/// let context = RowContext { documents: Some(Documents::new([vec![2, 1]])?), ..RowContext::default() };
/// let x = Var::new(&[[1f32, 2., 3., 4.]], &Device::Cpu)?;
/// let places = context.document_places("example", [1, 4])?;
/// let groups: Vec<_> = places.iter().map(|place| place.map(|place| place.document)).collect();
/// let sums = context.scope(|| document_sums(&x, &groups, context.document_count(1)))?;
/// assert_eq!(sums.to_vec1::<f32>()?, [3., 3.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn document_sums(x: &Tensor, groups: &[Option<usize>], count: usize) -> candle_core::Result<Tensor> {
    const NAME: &str = "document_sums";
    let unfit = |problem: String| Error::UnfitDocuments { operation: NAME, problem };
    let (rows, places) = match x.dims() {
        [rows, places, ..] => (*rows, *places),
        dims => return Err(unfit(format!("a tensor of shape {dims:?}: give (rows, places, ..)")).into()),
    };
    if groups.len() != rows * places {
        let problem = format!("groups of {} places: give those of {rows} rows of {places}", groups.len());
        return Err(unfit(problem).into());
    }
    if let Some(group) = groups.iter().flatten().find(|group| **group >= count) {
        return Err(unfit(format!("group {group} of {count}")).into());
    }
    let divided = RowContext::current().divided;
    // What counts nowhere is in a group behind the others.
    let index: Vec<u32> = groups.iter().map(|group| group.unwrap_or(count) as u32).collect();
    let index = Tensor::from_vec(index, groups.len(), x.device())?;
    let flat = [&[groups.len()], &x.dims()[2..]].concat();
    let sums = Tensor::zeros([&[count + 1], &x.dims()[2..]].concat(), x.dtype(), x.device())?;
    let sums = sums.index_add(&index, &x.detach().contiguous()?.reshape(flat)?, 0)?;
    let sums = all_ranks(divided.as_ref(), &sums.narrow(0, 0, count)?.force_contiguous()?)?;
    tape::explicit_op1(NAME, [x], sums, move |[x], gradient| {
        let gradient = all_ranks(divided.as_ref(), &gradient.detach().force_contiguous()?)?;
        let nowhere = Tensor::zeros([&[1], &x.dims()[2..]].concat(), x.dtype(), x.device())?;
        Ok([Some(Tensor::cat(&[gradient, nowhere], 0)?.index_select(&index, 0)?.reshape(x.shape())?)])
    })
}

fn all_ranks(divided: Option<&DividedRows>, own: &Tensor) -> candle_core::Result<Tensor> {
    divided.map_or_else(|| Ok(own.clone()), |divided| divided.sum_of_ranks(own))
}

impl DividedRows {
    /// The sum of a tensor over ranks, on each of them, to the same bits. All give the same shape; gradients do not go through.
    ///
    /// # Cost
    /// Sends the tensor to each other rank: it should be small.
    ///
    /// # Errors
    /// Those of candle, and failures of communication.
    pub fn sum_of_ranks(&self, own: &Tensor) -> candle_core::Result<Tensor> {
        let own = own.detach().to_device(&Device::Cpu)?.contiguous()?;
        let (rank, ranks) = (self.rank(), self.ranks());
        let mut parts: Vec<Tensor> = Vec::with_capacity(ranks);
        for of in 0..ranks {
            parts.push(if of == rank { own.clone() } else { own.zeros_like()? });
        }
        if own.elem_count() > 0 {
            for step in 1..ranks {
                let [to, from] = [(rank + step) % ranks, (rank + ranks - step) % ranks];
                self.exchange().begin((to, vec![own.clone()]), (from, vec![parts[from].clone()]))?.wait()?;
            }
        }
        let wide = if own.dtype().is_float() { DType::F64 } else { own.dtype() };
        let mut sum = own.zeros_like()?.to_dtype(wide)?;
        for part in &parts {
            sum = (sum + part.to_dtype(wide)?)?;
        }
        sum.to_dtype(own.dtype())
    }
}
