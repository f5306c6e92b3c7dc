// An image from a file: its middle, resized to the size that the model takes.
function startImage() {
  show(newImage(() => {}), $("picture"));
  $("file").addEventListener("change", (event) => openFile(event.target.files[0]));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    openFile(event.dataTransfer.files[0]);
  });
  request(null);
}

async function openFile(file) {
  const source = file && await createImageBitmap(file).catch(() => null);
  if (!source) {
    return attempt(() => { throw new Error("This browser cannot read the file as an image."); });
  }
  const {height, width} = facts;
  const scale = Math.max(width / source.width, height / source.height);
  const [w, h] = [scale * source.width, scale * source.height];
  const image = newImage((context) => {
    context.imageSmoothingQuality = "high";
    context.drawImage(source, (width - w) / 2, (height - h) / 2, w, h);
  });
  show(image, $("picture"));
  request(valuesOf(image));
}
