//! A page of sections: text, tables and plots of any numbers.

mod plot;
mod stacks;

use std::path::Path;

use askama::Template;

pub use plot::{Curve, Line, Plot};
pub use stacks::Stacks;

use crate::chart::Chart;
use crate::error::write_page;
use crate::page::{Colour, colours};
use crate::{Error, Result};

/// A page, one section below the other.
///
/// ```
/// use report::sheet::{Curve, Figure, Line, Plot, Section, Sheet};
///
/// let curve = Curve { name: "ddp".into(), points: vec![(1.0, 1.0), (2.0, 1.9)], line: Line::Solid, colour: 0 };
/// let plot = Plot { title: "Speed-up".into(), curves: vec![curve], ..Plot::default() };
/// let section = Section { heading: "Measured".into(), figures: vec![Figure::Plot(plot)], ..Section::default() };
/// let html = Sheet { title: "Scaling".into(), sections: vec![section], ..Sheet::default() }.render()?;
/// assert!(html.contains("<svg") && !html.contains("href"));
/// # Ok::<(), report::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sheet {
    /// What it is about.
    pub title: String,
    /// How it was made.
    pub command_line: String,
    /// Where it is explained how to read the page.
    pub help: Option<Help>,
    /// When, as RFC 3339; see [`crate::now_rfc3339`].
    pub date: String,
    /// Where.
    pub host: String,
    /// What else is worth to know: name and value, in this order.
    pub facts: Vec<(String, String)>,
    /// Its contents.
    pub sections: Vec<Section>,
}

/// A text that explains a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Help {
    /// Its name, for readers who cannot follow the link.
    pub name: String,
    /// Where it is, as a link has it. None: the name alone is shown.
    pub address: Option<String>,
}

/// A part of a [`Sheet`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Section {
    /// Its heading.
    pub heading: String,
    /// Paragraphs.
    pub text: Vec<String>,
    /// What is drawn, two beside each other where there is room. One without data is left out.
    pub figures: Vec<Figure>,
    /// Numbers, below the figures.
    pub tables: Vec<Table>,
}

/// Something drawn.
#[derive(Debug, Clone, PartialEq)]
pub enum Figure {
    /// Curves.
    Plot(Plot),
    /// Bars of several parts.
    Stacks(Stacks),
}

/// Rows of text; the first cell of each names it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Table {
    /// What it shows; none is written where it is empty.
    pub caption: String,
    /// Over the columns.
    pub heads: Vec<String>,
    /// As many cells in each as there are heads.
    pub rows: Vec<Vec<String>>,
}

impl Sheet {
    /// The page: HTML with its style and plots inside. It loads nothing, and [`Sheet::help`] is its only link. All text is escaped.
    ///
    /// # Errors
    /// None that is known; those of the libraries that draw are passed on.
    pub fn render(&self) -> Result<String> {
        let part = |section: &'_ Section| {
            let charts = section.figures.iter().map(Figure::chart).collect::<Result<Vec<_>>>();
            Ok(charts?.into_iter().flatten().collect())
        };
        let charts = self.sections.iter().map(part).collect::<Result<Vec<Vec<Chart>>>>()?;
        let parts = self.sections.iter().zip(charts).collect();
        let page = Page { report: self, colours: colours(), parts };
        page.render().map_err(|error| Error::Page { reason: error.to_string() })
    }

    /// Writes the page to a file.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the reason.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_page(path, &self.render()?)
    }
}

impl Figure {
    fn chart(&self) -> Result<Option<Chart>> {
        match self {
            Self::Plot(plot) => plot.chart(),
            Self::Stacks(stacks) => stacks.chart(),
        }
    }
}

#[derive(Template)]
#[template(path = "sheet.html")]
struct Page<'a> {
    report: &'a Sheet,
    colours: Vec<Colour>,
    parts: Vec<(&'a Section, Vec<Chart>)>,
}

#[cfg(test)]
mod tests;
