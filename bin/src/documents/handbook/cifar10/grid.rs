//! Pictures that a model has classified, as one PNG.

use std::path::Path;

use font8x8::UnicodeFonts;
use training::FileError;

/// Side of the square that each pixel of a picture is drawn as.
const SCALE: usize = 3;
const GAP: usize = 8;
/// Height of a line of text, with the space below it.
const LINE: usize = 10;
const MOST_COLUMNS: usize = 8;

type Colour = [u8; 3];

const PAPER: Colour = [255; 3];
const INK: Colour = [0; 3];
const RIGHT: Colour = [0, 128, 0];
const WRONG: Colour = [192, 0, 0];

/// A square picture with its class.
#[derive(Debug, Clone, Copy)]
pub(super) struct Classified<'a> {
    /// All red values, row by row, then green, then blue.
    pub(super) bytes: &'a [u8],
    /// Name of its class.
    pub(super) name: &'a str,
    /// Name of the class that was predicted, green if it is right and red if it is not.
    pub(super) predicted: &'a str,
}

/// Writes a grid of pictures, each `side` pixels high and wide, with true and predicted class below.
///
/// # Errors
/// A file that cannot be written.
pub(super) fn write_pictures(path: &Path, side: usize, pictures: &[Classified<'_>]) -> Result<(), FileError> {
    let (canvas, width, height) = draw(side, pictures);
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    let encoded = encoder.write_header().and_then(|mut writer| writer.write_image_data(&canvas.dots));
    encoded.map_err(|error| FileError::write(path, error))?;
    training::internal::write_output(path, &file).map_err(|error| FileError::write(path, error))
}

/// Width and height of a picture with its text and the gap to the next.
const fn cell(side: usize) -> (usize, usize) {
    (SCALE * side + GAP, SCALE * side + 2 * LINE + 2 + GAP)
}

/// Returns the grid, its width and its height.
fn draw(side: usize, pictures: &[Classified<'_>]) -> (Canvas, usize, usize) {
    let columns = pictures.len().clamp(1, MOST_COLUMNS);
    let rows = pictures.len().div_ceil(columns).max(1);
    let cell = cell(side);
    let (width, height) = (columns * cell.0 + GAP, rows * cell.1 + GAP);
    let mut canvas = Canvas { dots: PAPER.repeat(width * height), width };
    for (index, Classified { bytes, name, predicted }) in pictures.iter().enumerate() {
        let (x, y) = (GAP + index % columns * cell.0, GAP + index / columns * cell.1);
        canvas.picture(x, y, side, bytes);
        let below = y + SCALE * side + 2;
        canvas.text(x, below, &format!("true {name}"), INK);
        let colour = if predicted == name { RIGHT } else { WRONG };
        canvas.text(x, below + LINE, &format!("pred {predicted}"), colour);
    }
    (canvas, width, height)
}

struct Canvas {
    /// Three bytes (RGB) per pixel, row by row.
    dots: Vec<u8>,
    width: usize,
}

impl Canvas {
    /// Sets a pixel, if it is inside the canvas.
    fn set(&mut self, x: usize, y: usize, colour: Colour) {
        let at = 3 * (y * self.width + x);
        if let Some(dot) = self.dots.get_mut(at..at + 3).filter(|_| x < self.width) {
            dot.copy_from_slice(&colour);
        }
    }

    fn picture(&mut self, x: usize, y: usize, side: usize, bytes: &[u8]) {
        for row in 0..SCALE * side {
            for column in 0..SCALE * side {
                let at = row / SCALE * side + column / SCALE;
                self.set(x + column, y + row, [0, 1, 2].map(|colour| bytes[colour * side * side + at]));
            }
        }
    }

    fn text(&mut self, x: usize, y: usize, text: &str, colour: Colour) {
        for (index, glyph) in text.chars().filter_map(|c| font8x8::BASIC_FONTS.get(c)).enumerate() {
            for (row, bits) in glyph.into_iter().enumerate() {
                for column in (0..8).filter(|column| bits >> column & 1 == 1) {
                    self.set(x + 8 * index + column, y + row, colour);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIDE: usize = 32;
    const CELL: (usize, usize) = cell(SIDE);

    #[test]
    fn what_is_written_is_a_png_of_the_grid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grid.png");
        let names = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship"];
        let bytes = |index: usize| (0..3 * SIDE * SIDE).map(move |at| (index * 10 + at % 7) as u8).collect();
        let all: Vec<Vec<u8>> = (0..9).map(bytes).collect();
        let pictures = std::array::from_fn::<_, 9, _>(|index| {
            let predicted = if index == 2 { "dog" } else { names[index] };
            Classified { bytes: &all[index], name: names[index], predicted }
        });
        write_pictures(&path, SIDE, &pictures).unwrap();
        let file = std::io::BufReader::new(std::fs::File::open(&path).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut dots = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut dots).unwrap();
        let (width, height) = (8 * CELL.0 + GAP, 2 * CELL.1 + GAP);
        assert_eq!((info.width as usize, info.height as usize), (width, height));
        let (canvas, ..) = draw(SIDE, &pictures);
        assert_eq!(dots, canvas.dots);
        // The ninth picture is in the second row; check its first pixel.
        let at = 3 * ((GAP + CELL.1) * width + GAP);
        let ninth = &all[8];
        assert_eq!(dots[at..at + 3], [ninth[0], ninth[SIDE * SIDE], ninth[2 * SIDE * SIDE]]);
        // One of the nine is wrong.
        assert!(dots.chunks(3).any(|dot| dot == WRONG) && dots.chunks(3).any(|dot| dot == RIGHT));
    }

    #[test]
    fn text_is_drawn_where_it_is_and_cut_at_the_edge() {
        let mut canvas = Canvas { dots: PAPER.repeat(20 * 8), width: 20 };
        canvas.text(0, 0, "il!", INK);
        let dark =
            |from: usize, to: usize| (0..8).any(|y| (from..to).any(|x| canvas.dots[3 * (y * 20 + x)] == 0));
        assert!(dark(0, 8) && dark(8, 16) && dark(16, 20));
        let mut blank = Canvas { dots: PAPER.repeat(20 * 8), width: 20 };
        blank.text(100, 100, "x", INK);
        assert!(blank.dots.iter().all(|byte| *byte == 255));
    }
}
