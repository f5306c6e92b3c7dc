// Show what the model's input asks for.
$(facts.input).hidden = false;
({draw: startDrawing, image: startPicture, numbers: startNumbers})[facts.input]();
