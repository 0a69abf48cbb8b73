//! Shared parts of all plots: size, frame, colours.

use plotters::chart::{ChartBuilder, ChartContext};
use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::{Cartesian2d, Color, IntoDrawingArea, RGBColor, SVGBackend};

use crate::axis::Axis;
use crate::hover::Hover;
use crate::{Error, Result};

/// Scale of the drawing. The plotting library rounds positions to whole pixels, so plots are drawn this much larger and
/// displayed smaller.
const FINENESS: u32 = 4;

/// The series' colours: as drawn, for a light page, and their replacements on a dark page.
pub(super) const COLOURS: [(RGBColor, &str); 6] = [
    (RGBColor(0x1D, 0x63, 0xD8), "#6EA8FF"),
    (RGBColor(0xC4, 0x5A, 0x0A), "#FF9F55"),
    (RGBColor(0x1A, 0x7F, 0x4B), "#4FCB8A"),
    (RGBColor(0x80, 0x3F, 0xC4), "#C79BFF"),
    (RGBColor(0xC2, 0x2A, 0x52), "#FF7F9E"),
    (RGBColor(0x0B, 0x7A, 0x87), "#4CC9D8"),
];

const GREY: RGBColor = RGBColor(0x80, 0x80, 0x80);

pub(super) type Frame<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Axis, Axis>>;
pub(super) type Drawn = std::result::Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// A plot for the page.
#[derive(Debug, Clone)]
pub(super) struct Chart {
    /// Title.
    pub(super) title: String,
    /// Text for readers who cannot see the plot.
    pub(super) summary: String,
    /// Colour number and name of each series, if there are several.
    pub(super) legend: Vec<(usize, String)>,
    /// Text below the plot.
    pub(super) note: String,
    /// The values that the page shows where the pointer is.
    pub(super) hover: Option<Hover>,
    pub(super) svg: String,
}

/// Size and axes of a plot.
pub(super) struct Layout<'a> {
    /// In pixels of the page.
    pub(super) size: (u32, u32),
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) x_name: &'a str,
    pub(super) y_name: &'a str,
    /// Whether there are grid lines at the ticks of x.
    pub(super) x_grid: bool,
}

/// Width in pixels of the page of a plot that takes the full width.
const FULL_WIDTH: u32 = 920;
/// Size of the same plot on a narrow page, on which the wide one would be illegible.
const NARROW: (u32, u32) = (450, 300);

/// Draws a plot of full page width and `height` pixels, and the same for a narrow page; the page displays one of them.
pub(super) fn draw_full_width<'a>(
    title: &str,
    height: u32,
    layout: impl Fn((u32, u32)) -> Layout<'a>,
    paint: impl Fn(&mut Frame<'_, '_>) -> Drawn,
) -> Result<String> {
    let one = |size| draw(title, layout(size), &paint);
    let (broad, narrow) = (one((FULL_WIDTH, height))?, one(NARROW)?);
    Ok(format!("<div class=\"broad\">{broad}</div><div class=\"narrow\">{narrow}</div>"))
}

/// Draws a plot as SVG: frame, ticks, axis names, and what `paint` adds.
pub(super) fn draw(
    title: &str,
    layout: Layout<'_>,
    paint: impl FnOnce(&mut Frame<'_, '_>) -> Drawn,
) -> Result<String> {
    let mut svg = String::new();
    let inner = draw_into(&mut svg, layout, paint)
        .map_err(|error| Error::Plot { chart: title.to_string(), reason: error.to_string() })?;
    // For the page's script: the corners between the axes.
    Ok(svg.replacen("<svg ", &format!("<svg data-inner=\"{inner:?}\" "), 1))
}

/// Returns the left, top, right and bottom edge of the area between the axes.
fn draw_into(
    svg: &mut String,
    layout: Layout<'_>,
    paint: impl FnOnce(&mut Frame<'_, '_>) -> Drawn,
) -> std::result::Result<[i32; 4], DrawingAreaErrorKind<std::io::Error>> {
    let size = (layout.size.0 * FINENESS, layout.size.1 * FINENESS);
    let area = SVGBackend::with_string(svg, size).into_drawing_area();
    let mut frame = ChartBuilder::on(&area)
        .margin(px(6))
        .margin_right(px(16))
        .x_label_area_size(px(44))
        .y_label_area_size(px(62))
        .build_cartesian_2d(layout.x, layout.y)?;
    let mut mesh = frame.configure_mesh();
    if !layout.x_grid {
        mesh.disable_x_mesh();
    }
    mesh.light_line_style(GREY.mix(0.))
        .bold_line_style(GREY.mix(0.25).stroke_width(FINENESS))
        .axis_style(GREY.stroke_width(FINENESS))
        .set_all_tick_mark_size(px(4))
        .label_style(("sans-serif", text(12)))
        .axis_desc_style(("sans-serif", text(13)))
        .x_desc(layout.x_name)
        .y_desc(layout.y_name)
        .draw()?;
    paint(&mut frame)?;
    let (x, y) = frame.plotting_area().get_pixel_range();
    let inner = [x.start, y.start.min(y.end), x.end, y.start.max(y.end)];
    drop(frame);
    area.present()?;
    Ok(inner)
}

/// Converts pixels of the page to pixels of the drawing.
pub(super) fn px(length: i32) -> i32 {
    length * FINENESS as i32
}

/// Returns the colour of a series.
pub(super) fn colour(series: usize) -> RGBColor {
    COLOURS[series % COLOURS.len()].0
}

/// Converts a text size to the library's, which is 1.24 times what it displays.
pub(super) fn text(size: u32) -> f64 {
    f64::from(size * FINENESS) * 1.24
}
