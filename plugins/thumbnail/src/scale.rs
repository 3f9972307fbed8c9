//! Decode, scale, encode. Pure: bytes in, bytes out.
//!
//! Nothing here may allocate without a bound, because the size of the pixels is chosen by whoever made the file.

use std::io::Cursor;

use image::{
    DynamicImage, ImageDecoder, ImageEncoder, ImageError, ImageReader, ImageResult, Limits, Rgb, RgbImage,
    codecs::{jpeg::JpegEncoder, png::PngEncoder},
    imageops::FilterType,
    metadata::Orientation,
};

use crate::request::Format;

/// A decoded photo and its way to be turned upright.
pub struct Decoded {
    pixels: DynamicImage,
    orientation: Orientation,
}

/// 160 MiB hold 40 megapixels in RGBA, 55 in RGB. With the file and the scaler's buffers it stays below the cap.
const MAX_PIXEL_BYTES: u64 = 160 << 20;
/// The decoder keeps two bytes of coefficients for every byte of a progressive JPEG's pixels until the last scan. An
/// allocation that fails would be a trap, and a trap is retried in vain; so this is refused before.
const MAX_PROGRESSIVE_BYTES: u64 = 64 << 20;
const MAX_SOURCE_SIDE: u32 = 30_000;
const JPEG_QUALITY: u8 = 85;

/// Only PNG and JPEG, told by their content: a file's name proves nothing.
pub fn decode(bytes: &[u8]) -> ImageResult<Decoded> {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SOURCE_SIDE);
    limits.max_image_height = Some(MAX_SOURCE_SIDE);
    limits.max_alloc = Some(if is_progressive_jpeg(bytes) { MAX_PROGRESSIVE_BYTES } else { MAX_PIXEL_BYTES });

    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(ImageError::IoError)?;
    reader.limits(limits.clone());
    let mut decoder = reader.into_decoder()?;
    // The reader's own limits cover the decoder's scratch space; the pixels are reserved by whoever asks for them.
    limits.reserve(decoder.total_bytes())?;
    let orientation = decoder.orientation()?;
    Ok(Decoded { pixels: DynamicImage::from_decoder(decoder)?, orientation })
}

/// Walks the segments up to the frame header, whose marker says how the picture is coded.
fn is_progressive_jpeg(bytes: &[u8]) -> bool {
    let mut at = 2;
    while let Some(&[0xff, marker, high, low]) = bytes.get(at..at + 4) {
        match marker {
            0xc2 | 0xc6 | 0xca | 0xce => return bytes.starts_with(b"\xff\xd8"),
            // Padding before a marker.
            0xff => at += 1,
            // The scan begins without one of the above.
            0xda => return false,
            _ => at += 2 + usize::from(u16::from_be_bytes([high, low])),
        }
    }
    false
}

/// Fits into the box, keeps the proportions and never enlarges.
pub fn fit(decoded: Decoded, width: u32, height: u32) -> DynamicImage {
    let Decoded { mut pixels, orientation } = decoded;
    // A sideways photo is turned after scaling, when it is small; until then its box lies on its side too.
    let (width, height) = if turns_on_its_side(orientation) { (height, width) } else { (width, height) };
    if pixels.width() > width || pixels.height() > height {
        // A far larger picture is first averaged down, which costs one pass; the good filter then reads little.
        if pixels.width() / 4 > width && pixels.height() / 4 > height {
            pixels = pixels.thumbnail(width * 2, height * 2);
        }
        pixels = pixels.resize(width, height, FilterType::Lanczos3);
    }
    pixels.apply_orientation(orientation);
    pixels
}

fn turns_on_its_side(orientation: Orientation) -> bool {
    use Orientation::*;
    match orientation {
        Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH => true,
        NoTransforms | Rotate180 | FlipHorizontal | FlipVertical => false,
    }
}

/// Always eight bits a channel; what shows thumbnails has no use for more.
pub fn encode(image: &DynamicImage, format: Format) -> ImageResult<Vec<u8>> {
    let mut out = Vec::new();
    match format {
        Format::Jpeg => on_white(image).write_with_encoder(JpegEncoder::new_with_quality(&mut out, JPEG_QUALITY))?,
        Format::Png if image.color().has_alpha() => {
            let rgba = image.to_rgba8();
            PngEncoder::new(&mut out).write_image(rgba.as_raw(), rgba.width(), rgba.height(), image::ExtendedColorType::Rgba8)?;
        }
        Format::Png => image.to_rgb8().write_with_encoder(PngEncoder::new(&mut out))?,
    }
    Ok(out)
}

/// JPEG has no transparency, and dropping the channel shows whatever colour the hidden pixels had.
fn on_white(image: &DynamicImage) -> RgbImage {
    if !image.color().has_alpha() {
        return image.to_rgb8();
    }
    let rgba = image.to_rgba8();
    RgbImage::from_fn(rgba.width(), rgba.height(), |x, y| {
        let [r, g, b, a] = rgba.get_pixel(x, y).0.map(u32::from);
        let over = |channel: u32| ((channel * a + 255 * (255 - a) + 127) / 255) as u8;
        Rgb([over(r), over(g), over(b)])
    })
}

#[cfg(test)]
mod tests {
    use image::{Rgba, RgbaImage};

    use super::*;

    fn picture(width: u32, height: u32) -> DynamicImage {
        RgbImage::from_fn(width, height, |x, y| Rgb([x as u8, y as u8, 90])).into()
    }

    fn upright(pixels: DynamicImage) -> Decoded {
        Decoded { pixels, orientation: Orientation::NoTransforms }
    }

    fn size(image: &DynamicImage) -> (u32, u32) {
        (image.width(), image.height())
    }

    #[test]
    fn fits_the_box_and_keeps_proportions() {
        assert_eq!(size(&fit(upright(picture(400, 200)), 100, 100)), (100, 50));
        assert_eq!(size(&fit(upright(picture(2000, 1000)), 100, 100)), (100, 50));
        assert_eq!(size(&fit(upright(picture(40, 20)), 100, 100)), (40, 20), "never enlarged");
        assert_eq!(size(&fit(upright(picture(3000, 1)), 100, 100)), (100, 1), "no side becomes 0");
    }

    #[test]
    fn a_sideways_photo_is_turned_and_still_fits() {
        let sideways = Decoded { pixels: picture(400, 200), orientation: Orientation::Rotate90 };
        assert_eq!(size(&fit(sideways, 60, 100)), (50, 100));
    }

    #[test]
    fn what_is_encoded_can_be_decoded() {
        for format in [Format::Png, Format::Jpeg] {
            let bytes = encode(&picture(30, 20), format).unwrap();
            assert_eq!(size(&decode(&bytes).unwrap().pixels), (30, 20));
        }
    }

    #[test]
    fn hidden_pixels_become_white_in_jpeg() {
        let clear: DynamicImage = RgbaImage::from_pixel(16, 16, Rgba([0, 0, 0, 0])).into();
        let back = decode(&encode(&clear, Format::Jpeg).unwrap()).unwrap().pixels.to_rgb8();
        assert!(back.pixels().all(|p| p.0.iter().all(|&c| c > 250)));
    }

    #[test]
    fn refuses_what_is_no_image_and_what_is_too_large() {
        assert!(decode(b"").is_err());
        assert!(decode(b"plain text, not an image").is_err());
        let whole = encode(&picture(64, 64), Format::Png).unwrap();
        assert!(decode(&whole[..whole.len() / 2]).is_err(), "cut in the middle");

        // A header that promises 30,000 x 30,000 pixels, with a right checksum and nothing behind it.
        let mut header = b"IHDR".to_vec();
        header.extend(30_000u32.to_be_bytes());
        header.extend(30_000u32.to_be_bytes());
        header.extend([8, 2, 0, 0, 0]);
        let mut bomb = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
        bomb.extend(&header);
        bomb.extend(crc(&header).to_be_bytes());
        bomb.extend(b"\0\0\0\0IDAT");
        assert!(matches!(decode(&bomb), Err(ImageError::Limits(_))));
    }

    #[test]
    fn tells_a_progressive_jpeg_by_its_frame_header() {
        let baseline = encode(&picture(30, 20), Format::Jpeg).unwrap();
        assert!(!is_progressive_jpeg(&baseline));
        let frame = baseline.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
        let mut progressive = baseline.clone();
        progressive[frame + 1] = 0xc2;
        assert!(is_progressive_jpeg(&progressive));
        assert!(!is_progressive_jpeg(&encode(&picture(30, 20), Format::Png).unwrap()));
        for len in 0..progressive.len() {
            // Whatever is cut off, the walk ends.
            is_progressive_jpeg(&progressive[..len]);
        }
    }

    fn crc(bytes: &[u8]) -> u32 {
        !bytes
            .iter()
            .fold(!0, |crc: u32, &byte| (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 }))
    }
}
